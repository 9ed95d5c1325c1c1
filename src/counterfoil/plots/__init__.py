"""All drawing: charts, comparisons with papers, maps, and pictures of sentences."""
