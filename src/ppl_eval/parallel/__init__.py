"""Meshes, processes and sharding. Imports torch only."""
