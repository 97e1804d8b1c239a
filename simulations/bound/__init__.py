"""The fluid bound: a rate that no policy can exceed, what limits it, and what each resource is worth."""

from simulations.bound.fluid import Bound, DecodePrices, Prices, ResourceBound, fluid_bound

__all__ = ["Bound", "DecodePrices", "Prices", "ResourceBound", "fluid_bound"]
