"""Model families, their registry and the loading of their weights. Know no requests."""
