"""UNCERTAINTY. Step features, validated domain, and prediction intervals from errors of unseen steps."""
