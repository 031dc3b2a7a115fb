"""Several models behind one port: which of them are loaded, and where each request goes."""
