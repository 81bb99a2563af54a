"""Which requests a step computes, and their pages."""
