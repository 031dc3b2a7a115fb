"""Programs that run in the peers' environments and import nothing from this repository."""
