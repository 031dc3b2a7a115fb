"""Model ids to local folders: download, resume, verify, convert, merge adapters."""
