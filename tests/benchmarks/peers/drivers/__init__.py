"""Programs that peers' own interpreters run; they import nothing of this repository."""
