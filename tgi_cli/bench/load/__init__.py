"""The load generator: a process that sends requests when it should, and notes when answers came.

``python -m tgi_cli.bench.load`` reads a job and its requests from stdin and writes what happens
to stdout (``frames``); ``bench/step_driver.py`` starts it. Nothing else runs in its
interpreter that could delay it: no tokenizer, no dashboard, no statistics.
"""
