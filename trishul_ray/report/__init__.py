"""What finished runs show: tables, figures, claims, and the page of them."""
