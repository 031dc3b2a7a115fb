"""Plumbing of processes: spawning, parent death, heartbeats, signals, sockets."""
