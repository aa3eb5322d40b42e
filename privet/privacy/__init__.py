"""Differential privacy: gradients, sampling, accounting and the ledger."""
