"""Results of finished runs: result.json, tables with tests, figures, and the page of them."""
