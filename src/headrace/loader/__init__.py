"""The thin builder: a dataset becomes a pinned, prefetching, seeded, resumable torch DataLoader."""
