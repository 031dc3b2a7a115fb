"""Images: fetching, decoding and preprocessing, without torch."""
