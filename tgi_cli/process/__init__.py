"""Plumbing shared by all processes: spawning, framing, heartbeats, signals, sockets, progress."""
