"""Training a draft head for a target: rows, features, training-time test, export."""
