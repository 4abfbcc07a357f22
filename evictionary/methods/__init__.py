"""Which methods there are, and how one is called on the states of a layer."""
