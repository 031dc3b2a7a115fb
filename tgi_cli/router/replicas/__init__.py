"""Several engines with the same model behind one router."""
