"""IS IT TRUE? Published cases as data, predicted and compared with what was measured."""
