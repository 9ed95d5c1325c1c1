"""Drawing: charts, heat maps, and explanations as pictures."""
