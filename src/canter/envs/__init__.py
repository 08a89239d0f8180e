"""Environments: the contract, the adapters that bring others to it, and torch-native ones."""
