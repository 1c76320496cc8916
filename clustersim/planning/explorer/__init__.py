"""clustersim/planning/explorer"""
