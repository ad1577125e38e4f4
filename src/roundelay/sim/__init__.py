"""Clusters that exist only in virtual time, the mathematical model, and recorded runs done again."""
