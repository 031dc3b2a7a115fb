"""Plumbing shared by all processes: spawning, parent death, heartbeats, signals, sockets, progress."""
