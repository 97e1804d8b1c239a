"""The PrfaaS case study (arXiv 2604.15039): the paper's model, and the same fleets event by event."""
