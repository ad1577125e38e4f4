"""Commands on virtual clusters."""
