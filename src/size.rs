//! Little's law: requests in flight = requests per second x seconds that each takes. Two of the three give the third.

use std::{fmt::Write, time::Duration};

/// What is known.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    /// Requests per second, on average.
    pub rate: Option<f64>,
    /// How long one request keeps its slot, on average.
    pub hold: Option<Duration>,
    /// The slots that there are.
    pub slots: Option<u32>,
    /// How far the rate rises above its average.
    pub burst: f64,
}

/// Reads `400/s`, `90/m` or `1000/h`, and returns requests per second.
///
/// # Errors
/// The rule that is broken.
pub fn rate(text: &str) -> Result<f64, String> {
    let per_second = text.split_once('/').and_then(|(number, unit)| {
        let seconds = match unit {
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            _ => return None,
        };
        Some(number.parse::<f64>().ok()? / seconds)
    });
    per_second
        .filter(|rate| (1e-6..=1e9).contains(rate))
        .ok_or_else(|| "must be a rate above 0, such as 400/s, 90/m or 1000/h".to_owned())
}

/// Returns a short table and one sentence of advice. Needs two of rate, hold and slots.
pub fn report(known: &Known) -> String {
    let hold = known.hold.map(|hold| hold.as_secs_f64());
    match (known.rate, hold, known.slots.map(f64::from)) {
        (Some(rate), Some(hold), slots) => slots_for(rate, hold, slots, known.burst),
        (None, Some(hold), Some(slots)) => rate_for(slots, hold, known.burst),
        (Some(rate), None, Some(slots)) => hold_for(slots, rate, known.burst),
        _ => "Two of rate, hold and slots are needed.\n".to_owned(),
    }
}

fn slots_for(rate: f64, hold: f64, slots: Option<f64>, burst: f64) -> String {
    let in_flight = rate * hold;
    let needed = whole(in_flight * burst);
    let mut rows = vec![
        ("rate", per_second(rate)),
        ("hold", seconds(hold)),
        ("in flight", format!("{} on average: rate x hold", number(in_flight))),
        ("slots", format!("{needed} needed: x {} for bursts", number(burst))),
    ];
    let advice = match slots {
        None => format!(
            "Set slots = {needed} if the upstream bears that many at once; with fewer than {} the queue only grows.",
            whole(in_flight)
        ),
        Some(slots) => {
            rows.push((
                "given",
                format!("{} slots serve {} at most", number(slots), per_second(slots / hold)),
            ));
            rows.push(("", format!("or bear a hold of {} at this rate", seconds(slots / rate))));
            let given = number(slots);
            if slots < in_flight {
                format!(
                    "{given} slots are too few: more comes than goes, and the queue only grows; set slots = {needed}."
                )
            } else if slots < needed as f64 {
                format!(
                    "{given} slots carry the average, but bursts wait in the queue; slots = {needed} carries them too."
                )
            } else {
                format!("{given} slots are enough, bursts included.")
            }
        }
    };
    table(&rows, &advice)
}

fn rate_for(slots: f64, hold: f64, burst: f64) -> String {
    let (most, steady) = (per_second(slots / hold), per_second(slots / hold / burst));
    let rows = [
        ("slots", number(slots)),
        ("hold", seconds(hold)),
        ("rate", format!("{most} at most: slots / hold")),
        ("steady", format!("{steady}: leaves room for bursts of x {}", number(burst))),
    ];
    let advice = format!(
        "Plan for {steady} on average: above it bursts wait in the queue, and above {most} the queue only grows."
    );
    table(&rows, &advice)
}

fn hold_for(slots: f64, rate: f64, burst: f64) -> String {
    let (most, steady) = (seconds(slots / rate), seconds(slots / rate / burst));
    let rows = [
        ("slots", number(slots)),
        ("rate", per_second(rate)),
        ("hold", format!("{most} at most: slots / rate")),
        ("steady", format!("{steady}: leaves room for bursts of x {}", number(burst))),
    ];
    let advice = format!(
        "Keep requests at {steady} on average: above it bursts wait in the queue, and above {most} the queue only grows."
    );
    table(&rows, &advice)
}

fn table(rows: &[(&str, String)], advice: &str) -> String {
    let mut out = String::new();
    for (name, value) in rows {
        writeln!(out, "{name:<11}{value}").expect("a String takes any text");
    }
    out + "\n" + advice + "\n"
}

/// Rounded up, except for what floating point adds.
fn whole(slots: f64) -> u64 {
    ((slots - 1e-9).ceil() as u64).max(1)
}

fn number(number: f64) -> String {
    let text = format!("{number:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn per_second(rate: f64) -> String {
    format!("{}/s", number(rate))
}

fn seconds(seconds: f64) -> String {
    if seconds < 1.0 {
        return format!("{}ms", number(seconds * 1000.0));
    }
    format!("{}s", number(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report_of(rate: Option<&str>, hold_ms: Option<u64>, slots: Option<u32>) -> String {
        report(&Known {
            rate: rate.map(|text| super::rate(text).unwrap()),
            hold: hold_ms.map(Duration::from_millis),
            slots,
            burst: 1.5,
        })
    }

    #[test]
    fn rates_have_a_unit() {
        for (text, expected) in
            [("400/s", 400.0), ("90/m", 1.5), ("1800/h", 0.5), ("0.5/s", 0.5), ("1e3/s", 1000.0)]
        {
            assert_eq!(rate(text), Ok(expected), "{text}");
        }
        for text in ["", "400", "/s", "400/d", "0/s", "-1/s", "nan/s", "inf/s", "1/s/s", "4 00/s"] {
            assert!(rate(text).is_err(), "{text}");
        }
    }

    #[test]
    fn rate_and_hold_give_slots() {
        assert_eq!(
            report_of(Some("400/s"), Some(100), None),
            "\
rate       400/s
hold       100ms
in flight  40 on average: rate x hold
slots      60 needed: x 1.5 for bursts

Set slots = 60 if the upstream bears that many at once; with fewer than 40 the queue only grows.
"
        );
        assert!(report_of(Some("1/h"), Some(1), None).contains("Set slots = 1 if"));
        assert!(report_of(Some("7/s"), Some(1_000), None).contains("Set slots = 11 if"));
    }

    #[test]
    fn slots_and_hold_give_the_rate() {
        assert_eq!(
            report_of(None, Some(100), Some(20)),
            "\
slots      20
hold       100ms
rate       200/s at most: slots / hold
steady     133.333/s: leaves room for bursts of x 1.5

Plan for 133.333/s on average: above it bursts wait in the queue, and above 200/s the queue only grows.
"
        );
    }

    #[test]
    fn slots_and_rate_give_the_hold() {
        let report = report_of(Some("4/s"), None, Some(20));
        assert!(report.contains("hold       5s at most: slots / rate\n"), "{report}");
        assert!(report.contains("steady     3.333s: leaves room"), "{report}");
    }

    #[test]
    fn given_slots_are_judged() {
        for (slots, verdict) in
            [(39, "too few"), (40, "carry the average"), (59, "carry the average"), (60, "enough")]
        {
            let report = report_of(Some("400/s"), Some(100), Some(slots));
            assert!(report.lines().last().unwrap().contains(verdict), "{slots}: {report}");
        }
        let report = report_of(Some("400/s"), Some(100), Some(20));
        assert!(report.contains("given      20 slots serve 200/s at most\n"), "{report}");
        assert!(report.contains("bear a hold of 50ms"), "{report}");
    }
}
