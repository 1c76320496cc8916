"""UNCERTAINTY. Step features, validated domain, and prediction intervals from out-of-sample errors."""
