"""Data: the arithmetic of a step (plan), the order of samples (order), loaders (loader), the loop's input (feed)."""

from trainkit.data.ray_data import RayData as RayData
