"""The watch over peers. In: what this process does. Out: when one fails, all end, with one line."""
