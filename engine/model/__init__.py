"""Models: find, download or convert, check, and load them."""
