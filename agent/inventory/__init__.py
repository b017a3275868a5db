"""Devices, their health and claims in; the list of each resource out."""
