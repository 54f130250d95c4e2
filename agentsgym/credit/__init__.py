"""Assign credit: place rewards on turns and tokens (``rewards``), and estimate advantages (``advantages``)."""
