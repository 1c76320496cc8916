"""Mixers: one file per kind of token mixing, with its operators on one rank; `registry` lists them."""
