"""Recipes: from recordings to a word error rate, stage by stage; the room where the speech road meets the engine."""
