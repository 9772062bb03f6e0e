"""Makes of a dataset a torch DataLoader that is seeded, resumable, prefetching and pinned."""
