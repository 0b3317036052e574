"""What finished runs show: result.json, tables, figures, claims, and the page of them."""
