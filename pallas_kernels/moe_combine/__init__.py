"""Experts' rows back to token rows, weighted and summed: moves rows on one device only."""

from pallas_kernels.moe_combine.api import combine_rows as combine_rows
