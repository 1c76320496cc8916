"""clustersim: how long does a training step take on a cluster, where does the time go, and does it fit?"""
