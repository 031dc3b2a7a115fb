"""The wire between router and model server. Nothing but translation."""
