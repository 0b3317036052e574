"""Results of finished runs: result.json, tables, figures, claims, and the page of them."""
