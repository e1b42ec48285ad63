"""Where data is, and moving it between ranks."""
