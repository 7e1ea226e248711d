"""Random interleavings of the production code over models of its stores, from one seed each."""
