"""Flow-level (fluid) network model: at which rate does each flow advance on shared links?"""
