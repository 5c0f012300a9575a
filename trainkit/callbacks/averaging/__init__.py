"""Averages of weights beside training:
exponential moving average and stochastic weight averaging.
"""
