"""Correctness and speed on a GPU, in three calls of at most nine minutes; see ``__main__``."""
