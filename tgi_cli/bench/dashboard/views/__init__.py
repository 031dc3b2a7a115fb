"""The views, one module each; the application says when to paint them."""
