"""Datasets: the samples of a storage, decoded, with their targets and transforms."""
