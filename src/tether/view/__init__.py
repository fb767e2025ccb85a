"""`tether view`: a local web page over run directories. It only reads, and nothing calls it."""
