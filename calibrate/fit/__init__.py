"""Fitting of cost-model constants to measurements."""
