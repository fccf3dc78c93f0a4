"""Things that several tests make on the spot: tiny models and drafters."""
