"""What runs beside Ray on the machines of a cluster."""
