"""Online dynamic batching: batches formed at the DataLoader, where true lengths are known."""
