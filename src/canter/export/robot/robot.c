/* See robot.h. Arithmetic is in double, one operation at a time, in the order of controller.py. */
#include "robot.h"

#include <math.h>
#include <string.h>

enum { DAMP, STAND };

static double clip(double x, double low, double high)
{
    x = x < low ? low : x;
    return x > high ? high : x;
}

static int fault(robot *r, int reason, int index, double value)
{
    r->reason = reason;
    r->index = index;
    r->value = value;
    return reason;
}

void robot_init(robot *r)
{
    memset(r, 0, sizeof *r);
    r->requested = -1;
    r->is_window_empty = 1;
    memcpy(r->sent.kd, robot_damping, sizeof r->sent.kd);
    r->before = r->sent;
}

void robot_request(robot *r, int mode)
{
    if (mode >= 0 && mode < ROBOT_MODES)
        r->requested = mode;
}

void robot_emergency_stop(robot *r)
{
    r->is_stopped = 1;
    r->requested = DAMP;
}

static double blend_weight(const robot *r, double now)
{
    const double blend = robot_modes[r->mode].blend;
    return blend > 0.0 ? fmin(1.0, (now - r->entered) / blend) : 1.0;
}

/* ---- what can be wrong ---- */

static int sensor_fault(robot *r, double now, const robot_sensors *s)
{
    const double *q = s->value + 2 * ROBOT_JOINTS;
    int first = 0;
    for (int i = 0; i < ROBOT_REQUIRED; first += robot_sensor_width[i++]) {
        if (!(now - s->stamp[i] <= ROBOT_MAX_AGE))
            return fault(r, ROBOT_STALE, i, now - s->stamp[i]);
        for (int k = 0; k < robot_sensor_width[i]; k++)
            if (!isfinite(s->value[first + k]))
                return fault(r, ROBOT_INVALID, i, 0.0);
    }
    if (fabs(q[0] * q[0] + q[1] * q[1] + q[2] * q[2] + q[3] * q[3] - 1.0) > 0.1)
        return fault(r, ROBOT_INVALID, 2, 0.0);
    return 0;
}

static int joint_fault(robot *r, const double *position, const double *velocity)
{
    for (int j = 0; j < ROBOT_JOINTS; j++) {
        if (!(robot_low[j] - ROBOT_POSITION_MARGIN <= position[j] &&
              position[j] <= robot_high[j] + ROBOT_POSITION_MARGIN))
            return fault(r, ROBOT_OUTSIDE, j, position[j]);
        if (fabs(velocity[j]) > ROBOT_VELOCITY_FACTOR * robot_velocity[j])
            return fault(r, ROBOT_FAST, j, velocity[j]);
    }
    return 0;
}

/* The joint that has not followed its target in stand for a while. */
static int astray_fault(robot *r, const double *position)
{
    int worst = 0;
    double largest = -1.0;
    for (int j = 0; j < ROBOT_JOINTS; j++) {
        const double error = fabs(r->aim[j] - position[j]);
        if (error > largest) {
            largest = error;
            worst = j;
        }
    }
    r->astray = r->mode == STAND && largest > ROBOT_STAND_ERROR ? r->astray + ROBOT_PERIOD : 0.0;
    return r->astray > ROBOT_STAND_SECONDS ? fault(r, ROBOT_ASTRAY, worst, largest) : 0;
}

static int find_fault(robot *r, double now, const robot_sensors *s, const double *gravity)
{
    const double gap = r->is_started ? now - r->last : 0.0;
    const double angle = acos(fmin(1.0, fmax(-1.0, -gravity[2])));
    const int mode = r->mode != DAMP ? r->mode : r->requested > STAND ? r->requested : STAND;
    r->late = gap > 1.5 * ROBOT_PERIOD ? r->late + 1 : 0;
    if (r->is_stopped)
        return fault(r, ROBOT_EMERGENCY, 0, 0.0);
    if (sensor_fault(r, now, s))
        return r->reason;
    if (gap > ROBOT_MAX_GAP)
        return fault(r, ROBOT_STALLED, 0, gap);
    if (r->late >= ROBOT_MAX_LATE)
        return fault(r, ROBOT_LATE, 0, r->late);
    if (angle > robot_modes[mode].max_tilt)
        return fault(r, ROBOT_TILTED, 0, angle);
    return joint_fault(r, s->value, s->value + ROBOT_JOINTS) ? r->reason : astray_fault(r, s->value);
}

/* ---- modes ---- */

static void enter(robot *r, int mode, double now, const double *position)
{
    const robot_mode *next = &robot_modes[mode];
    if (r->mode == DAMP) { /* full gains at once: the targets begin where the joints are */
        memcpy(r->sent.target, position, sizeof r->sent.target);
        memcpy(r->sent.kp, next->kp, sizeof r->sent.kp);
        memcpy(r->sent.kd, next->kd, sizeof r->sent.kd);
    }
    r->before = r->sent;
    memcpy(r->aim, r->sent.target, sizeof r->aim);
    r->mode = mode;
    r->entered = now;
    r->requested = -1;
    r->astray = 0.0;
    r->is_window_empty = 1;
    memset(r->action, 0, sizeof r->action);
    memset(r->action_before, 0, sizeof r->action_before);
    for (int k = 0; k < next->action_count; k++)
        r->filtered[k] = r->sent.target[next->actions[k]];
    if (next->reset)
        next->reset();
}

static void change_mode(robot *r, double now, int found, const double *position)
{
    const int wanted = r->requested;
    if (found && r->mode != DAMP) {
        enter(r, DAMP, now, position);
        return;
    }
    if (wanted == DAMP) {
        enter(r, DAMP, now, position);
        if (!found)
            fault(r, ROBOT_REQUESTED, 0, 0.0);
        return;
    }
    if (wanted >= 0 && found) {
        r->requested = -1;
        return;
    }
    fault(r, ROBOT_NONE, 0, 0.0);
    if (wanted >= 0 && !(robot_modes[wanted].enter_from >> r->mode & 1u)) {
        fault(r, ROBOT_REFUSED, wanted, 0.0);
        r->requested = -1;
    } else if (wanted >= 0 && (wanted == STAND || r->mode != STAND || blend_weight(r, now) >= 1.0)) {
        enter(r, wanted, now, position);
        fault(r, ROBOT_REQUESTED, 0, 0.0);
    } else if (wanted < 0 && r->mode != DAMP && now - r->entered >= robot_modes[r->mode].seconds) {
        enter(r, robot_modes[r->mode].next_mode, now, position);
        fault(r, ROBOT_OVER, 0, 0.0);
    }
}

/* ---- the policy ---- */

static void observe(robot *r, const robot_mode *mode, const double *value, const double *gravity)
{
    int at = 0;
    for (int i = 0; i < mode->segment_count; i++) {
        const robot_segment *s = &mode->segments[i];
        double *window = r->window + s->window, *newest = window + (s->history - 1) * s->count;
        const double *read = s->sensor == ROBOT_LAST_ACTION     ? r->action
                             : s->sensor == ROBOT_ACTION_BEFORE ? r->action_before
                             : s->sensor == ROBOT_GRAVITY       ? gravity
                                                                : value + s->sensor;
        memmove(window, window + s->count, sizeof *window * (size_t)((s->history - 1) * s->count));
        for (int k = 0; k < s->count; k++)
            newest[k] = clip(s->sign * read[s->columns[k]] - s->offset[k], s->low, s->high) * s->scale[k];
        for (int h = 0; r->is_window_empty && h < s->history - 1; h++)
            memcpy(window + h * s->count, newest, sizeof *window * (size_t)s->count);
        for (int k = 0; k < s->history * s->count; k++)
            r->obs[at++] = (float)window[k];
    }
    r->is_window_empty = 0;
}

/* Targets of the policy's joints; 0 if an output is not finite. */
static int act(robot *r, const robot_mode *mode, const double *position, double *wanted)
{
    float action[ROBOT_JOINTS];
    mode->step(r->obs, action);
    for (int k = 0; k < mode->action_count; k++)
        if (!isfinite(action[k]))
            return fault(r, ROBOT_NOT_FINITE, k, 0.0), 0;
    memcpy(r->action_before, r->action, sizeof r->action);
    for (int k = 0; k < mode->action_count; k++) {
        const int j = mode->actions[k];
        const double origin = mode->is_relative ? position[j] : mode->pose[j];
        r->action[k] = action[k];
        const double target = clip(origin + mode->scale[k] * r->action[k], mode->target_low[k], mode->target_high[k]);
        r->filtered[k] = r->filtered[k] + mode->smoothing[k] * (target - r->filtered[k]);
        wanted[j] = r->filtered[k];
    }
    return 1;
}

static void damp(robot *r, const double *position)
{
    r->limited = 0;
    for (int j = 0; j < ROBOT_JOINTS; j++) {
        r->sent.target[j] = isfinite(position[j]) ? position[j] : 0.0;
        r->sent.kp[j] = 0.0;
        r->sent.kd[j] = robot_damping[j];
    }
}

/* The target of one joint within the limits of position, rate and torque. */
static double limit(const robot *r, int j, double target, double kp, double kd, double position, double velocity)
{
    const double most = ROBOT_RATE_FACTOR * robot_velocity[j] * ROBOT_PERIOD;
    double limited = clip(target, robot_low[j], robot_high[j]);
    limited = clip(limited, r->sent.target[j] - most, r->sent.target[j] + most);
    if (kp > 0.0) {
        const double torque = kp * (limited - position) - kd * velocity;
        const double excess = torque - clip(torque, -robot_effort[j], robot_effort[j]);
        limited = limited - excess / kp;
    }
    return limited;
}

static void drive(robot *r, double now, const robot_sensors *s, const double *gravity)
{
    const robot_mode *mode = &robot_modes[r->mode];
    const double *position = s->value, *velocity = s->value + ROBOT_JOINTS;
    double wanted[ROBOT_JOINTS];
    const double weight = blend_weight(r, now);
    memcpy(wanted, mode->pose, sizeof wanted);
    if (mode->step) {
        observe(r, mode, s->value, gravity);
        if (!act(r, mode, position, wanted)) {
            enter(r, DAMP, now, position);
            damp(r, position);
            return;
        }
    }
    r->limited = 0;
    for (int j = 0; j < ROBOT_JOINTS; j++) {
        const double target = r->before.target[j] + weight * (wanted[j] - r->before.target[j]);
        const double kp = r->before.kp[j] + weight * (mode->kp[j] - r->before.kp[j]);
        const double kd = r->before.kd[j] + weight * (mode->kd[j] - r->before.kd[j]);
        const double limited = limit(r, j, target, kp, kd, position[j], velocity[j]);
        r->aim[j] = target;
        r->limited += limited != target;
        r->sent.target[j] = limited;
        r->sent.kp[j] = kp;
        r->sent.kd[j] = kd;
    }
}

void robot_step(robot *r, double now, const robot_sensors *s, robot_command *command)
{
    const double *q = s->value + 2 * ROBOT_JOINTS;
    const double gravity[3] = {2.0 * (q[0] * q[2] - q[1] * q[3]), -2.0 * (q[2] * q[3] + q[0] * q[1]),
                               2.0 * (q[1] * q[1] + q[2] * q[2]) - 1.0};
    int found;
    fault(r, ROBOT_NONE, 0, 0.0);
    found = find_fault(r, now, s, gravity);
    if (found && r->mode == DAMP && r->requested < 0)
        fault(r, ROBOT_NONE, 0, 0.0);
    r->last = now;
    r->is_started = 1;
    change_mode(r, now, found, s->value);
    if (r->mode == DAMP)
        damp(r, s->value);
    else
        drive(r, now, s, gravity);
    *command = r->sent;
}

/* ---- the log ---- */

static unsigned crc32_of(const unsigned char *bytes, int count)
{
    unsigned crc = 0xFFFFFFFFu;
    for (int i = 0; i < count; i++) {
        crc ^= bytes[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (0xEDB88320u & (0u - (crc & 1u)));
    }
    return ~crc;
}

static unsigned char *put_word(unsigned char *at, unsigned word)
{
    for (int i = 0; i < 4; i++)
        *at++ = (unsigned char)(word >> 8 * i);
    return at;
}

static unsigned char *put_number(unsigned char *at, double number)
{
    const float rounded = (float)number;
    unsigned word;
    memcpy(&word, &rounded, sizeof word);
    return put_word(at, word);
}

static unsigned char *put_numbers(unsigned char *at, const double *numbers, int count)
{
    for (int i = 0; i < count; i++)
        at = put_number(at, numbers[i]);
    return at;
}

void robot_log_record(robot *r, double now, const robot_sensors *s, int overruns, double seconds, unsigned char *record)
{
    const double status[] = {r->mode, r->reason, r->index, r->value, r->limited, overruns, seconds};
    int used = 0;
    unsigned char *at = put_word(record + 4, r->record++);
    unsigned halves[2];
    memcpy(halves, &now, sizeof now); /* little-endian machines, as all robots' are */
    at = put_word(put_word(at, halves[0]), halves[1]);
    at = put_numbers(at, status, 7);
    at = put_numbers(at, s->value, ROBOT_VALUES);
    for (int i = 0; i < ROBOT_SENSORS; i++)
        at = put_number(at, now - s->stamp[i]);
    for (int i = 0; i < robot_modes[r->mode].segment_count; i++)
        used += robot_modes[r->mode].segments[i].count * robot_modes[r->mode].segments[i].history;
    for (int i = 0; i < ROBOT_WIDTH; i++)
        at = put_number(at, i < used ? r->obs[i] : 0.0);
    at = put_numbers(at, r->action, ROBOT_JOINTS);
    at = put_numbers(at, r->sent.target, ROBOT_JOINTS);
    at = put_numbers(at, r->sent.kp, ROBOT_JOINTS);
    at = put_numbers(at, r->sent.kd, ROBOT_JOINTS);
    put_word(record, crc32_of(record + 4, (int)(at - record) - 4));
}
